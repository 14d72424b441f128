"""x"""
JOBS=[]
